"""`aglite report`: runs side by side as one HTML file that needs nothing else."""
