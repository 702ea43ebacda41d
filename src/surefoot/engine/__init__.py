"""The update, the window, evaluation, the guard and the loop: all that happens in training."""
