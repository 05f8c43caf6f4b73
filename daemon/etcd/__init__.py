"""The membership store on an etcd cluster: a thin client of its v3 API."""
