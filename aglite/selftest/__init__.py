"""`aglite doctor --selftest gpu`: everything that was written for a GPU, tried on the one that is here."""
