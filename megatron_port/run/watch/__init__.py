"""Heartbeats between ranks outside of the collectives: hung, lost, failing and slow ranks are named."""
