"""The scheduler half: offers loads to the engine and plans loads and stores."""
