"""Pictures and clips: guards, plans, decoding in disposable processes, frames in shared memory."""
