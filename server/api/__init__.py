"""HTTP: untrusted bodies in, server-sent events out. Talks to the media pool and to the engine's client, never to a tensor."""
