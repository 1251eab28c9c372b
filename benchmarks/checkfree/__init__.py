"""What it costs a training to lose pipeline stages, by the way in which they are made anew."""
