"""The command line. Only this room prints or exits; it and `models.devices` read the environment."""
