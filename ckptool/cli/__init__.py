"""The command line. Only this room prints, exits or reads the environment."""
