"""From graded rollouts to a weight update."""
