"""Continuous batching: which tokens of which sequences run in the next step. Knows page ids and token ids, no tensor."""
