class Transcript:
    pass
