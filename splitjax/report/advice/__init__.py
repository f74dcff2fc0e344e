"""What an `Advice` on partial backpropagation says to people: its rows, as text and as HTML."""
