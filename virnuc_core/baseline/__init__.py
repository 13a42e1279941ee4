"""The original algorithm and v1.0: the thing to beat, and the oracle of correctness."""
