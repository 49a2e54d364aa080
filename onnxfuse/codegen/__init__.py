"""Plans -> Library, through llvmlite: the only place that imports it."""
