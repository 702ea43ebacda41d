"""Models to train as they are: a decoder, a residual network and a perceptron."""
