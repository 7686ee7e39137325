"""Definition of an optimizer: stages, chains, states, and the base of all other packages."""
