"""Lost stages of a pipeline, made anew."""
