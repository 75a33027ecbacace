"""What happens between iterations: the phase switch, weight sync, evaluation, recording."""
