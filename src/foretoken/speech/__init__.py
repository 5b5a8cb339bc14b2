"""Speech to text: by Whisper, by other models window by window, and the times of words."""
