"""The HTTP APIs that agents speak. Each is a pure translation; everything else exists once."""
