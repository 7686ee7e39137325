"""What an optimizer is: stages, chains, states, and what all else stands on."""
