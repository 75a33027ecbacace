"""What answers the policy's turns: a user's own class, or one of the package verifiers."""
