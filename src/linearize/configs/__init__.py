"""All that a recipe and a layer plan hold, as data that pydantic validates. No torch: reading a recipe loads none."""
