"""How much memory a run will take on a GPU, known before it starts: by phase and by owner. Pure; loads no torch."""
