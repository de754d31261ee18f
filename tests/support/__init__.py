"""What tests share: small real media, shards, run files, processes."""
