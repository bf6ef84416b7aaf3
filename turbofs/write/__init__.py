"""What a mount writes: staged here, acknowledged as asked, brought to the source in the right order, never lost silently."""
