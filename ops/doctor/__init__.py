"""``rallypoint doctor``: can a job with this configuration run on this machine?"""
