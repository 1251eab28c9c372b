"""What saving costs the step."""
