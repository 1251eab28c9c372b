"""Writing the streams into the first tier, while training goes on."""
