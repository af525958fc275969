"""Pictures and clips: guards, plans, decoding in disposable processes, patches in shared memory."""
