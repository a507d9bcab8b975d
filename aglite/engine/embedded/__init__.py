"""The engine inside the model worker: continuous batching in plain torch. Import `.engine`, which imports torch."""
