"""Writing a run's numbers into TensorBoard, Weights & Biases or trackio.

Each writer is a process of its own, which reads the run's database: none of their libraries is ever loaded into the
supervisor, and whatever happens to one of them is no matter of training.
"""
