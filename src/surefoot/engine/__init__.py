"""The update, the window, evaluation, the guard and the loop: everything that happens while training."""
