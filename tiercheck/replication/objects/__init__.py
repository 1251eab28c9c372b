"""The objects that decisions are made from: asked for, read, verified, sealed."""
