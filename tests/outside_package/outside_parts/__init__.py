"""Parts of each kind, as somebody outside would write them."""
