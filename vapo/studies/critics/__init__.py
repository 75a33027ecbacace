"""Critics of a grid on the same rollouts, behind `vapo critics`."""
