"""Other people's libraries: thin, optional, and imported only when asked for."""
