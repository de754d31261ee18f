"""A small real data set of photographs and synthesised speech, built from installed packages."""
