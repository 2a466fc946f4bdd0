"""Memory methods: one file each."""
