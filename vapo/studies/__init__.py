"""What a setting can show, what critics come to know, what a run needs: on top of the core."""
