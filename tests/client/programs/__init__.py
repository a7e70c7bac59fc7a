"""Programs as users write them, for type checkers: every `assert_type` holds without a cast."""
