"""Training loops as users write them, killed at random moments: are all bits those of a run that nobody killed?"""
