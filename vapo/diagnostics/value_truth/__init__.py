"""What prefixes are worth by continuations from them, beside the critic (docs/value_truth.md)."""
