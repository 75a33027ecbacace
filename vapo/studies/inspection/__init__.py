"""The work of ``vapo inspect``: a diagnosis of anybody's rollouts and critic."""
