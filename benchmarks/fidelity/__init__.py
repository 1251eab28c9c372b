"""What a differential is worth: how far the state that it leads to is from the true one, and what that costs later."""
