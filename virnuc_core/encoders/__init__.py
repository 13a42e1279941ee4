"""Models over packed tokens: ESM-2, DNABERT-S, the head, their tokenisers and weights."""
