"""Twenty real cities with language and landmark, animals, and people's names to combine."""

CITIES = (
    ("Tokyo", "Japanese", "the Tokyo Skytree"),
    ("Paris", "French", "the Eiffel Tower"),
    ("Moscow", "Russian", "the Kremlin"),
    ("Berlin", "German", "the Brandenburg Gate"),
    ("Rome", "Italian", "the Colosseum"),
    ("Madrid", "Spanish", "the Prado Museum"),
    ("Lisbon", "Portuguese", "the Jerónimos Monastery"),
    ("Athens", "Greek", "the Parthenon"),
    ("Istanbul", "Turkish", "the Hagia Sophia"),
    ("Warsaw", "Polish", "the Palace of Culture and Science"),
    ("Amsterdam", "Dutch", "the Rijksmuseum"),
    ("Stockholm", "Swedish", "the Vasa Museum"),
    ("Oslo", "Norwegian", "the Munch Museum"),
    ("Helsinki", "Finnish", "the Temppeliaukio Church"),
    ("Budapest", "Hungarian", "the Fisherman's Bastion"),
    ("Prague", "Czech", "the Charles Bridge"),
    ("Cairo", "Arabic", "the Egyptian Museum"),
    ("Seoul", "Korean", "the Gyeongbokgung Palace"),
    ("Bangkok", "Thai", "the Temple of the Emerald Buddha"),
    ("Hanoi", "Vietnamese", "the Temple of Literature"),
)
"""City, the language most spoken there, a landmark."""

ANIMALS = tuple(
    "dog cat horse lion tiger bear wolf fox rabbit elephant monkey snake eagle shark whale frog "  # noqa: SIM905
    "turtle pig sheep goat".split()
)

FIRST_NAMES = tuple(
    "Anna Brian Carol David Emma Frank Grace Henry Irene James Karen Louis Maria Nathan Olivia "  # noqa: SIM905
    "Peter Rachel Simon Teresa Victor Alice Bruce Clara Daniel Elena Felix Helen Isaac Julia Kevin "
    "Laura Martin Nora Oscar Paula Robert Sarah Thomas Vera Walter".split()
)

LAST_NAMES = tuple(
    "Adams Baker Carter Dixon Ellis Foster Graham Harris Ingram Jenkins Keller Lawson Mason "  # noqa: SIM905
    "Norris Osborne Parker Quinn Reed Sawyer Turner Underwood Vaughn Wallace Young Abbott Barnes "
    "Collins Dawson Emerson Fletcher Gibson Hayes Irving Jordan Knight Lambert Morgan Newman "
    "Palmer Russell".split()
)
