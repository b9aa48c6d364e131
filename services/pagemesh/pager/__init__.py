"""The KV-page manager: it owns every page of KV memory on a host."""
