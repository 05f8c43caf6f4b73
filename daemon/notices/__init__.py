"""Watchers of the clouds' metadata services: is this machine about to be taken away?"""
