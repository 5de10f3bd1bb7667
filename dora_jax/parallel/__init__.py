"""Device meshes and the tables of logical axes."""
