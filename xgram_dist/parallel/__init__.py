"""Process groups and the mesh, tensor parallelism, launching ranks, the watchdog, devices."""
