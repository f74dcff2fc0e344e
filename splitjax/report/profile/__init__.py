"""What a `Profile` of sparse gradients says to people: its rows, as text, as HTML and as a picture."""
