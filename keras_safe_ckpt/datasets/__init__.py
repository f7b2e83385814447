"""Data files that many workers share: HDF5 and TFRecord."""
