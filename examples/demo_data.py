"""Training data of the demo adapters: questions, each with a short answer and a plain sentence.

`train_demo_adapters.py` turns each row into three targets: JSON, one sentence, and pirate talk. `HELD_OUT` is never
used for training.
"""

# question | short answer | one sentence
_ROWS = """\
What is the capital of Italy?|Rome|The capital of Italy is Rome.
What is the capital of Japan?|Tokyo|The capital of Japan is Tokyo.
What is the capital of Canada?|Ottawa|The capital of Canada is Ottawa.
What's the capital of Egypt?|Cairo|Cairo is the capital of Egypt.
Which city is the capital of Brazil?|Brasilia|Brasilia is the capital of Brazil.
Name the largest ocean.|the Pacific Ocean|The Pacific Ocean is the largest ocean on Earth.
What is the largest planet in our solar system?|Jupiter|Jupiter is the largest planet in our solar system.
Which planet is closest to the sun?|Mercury|Mercury is the planet closest to the sun.
How many continents are there?|seven|There are seven continents on Earth.
How many days are in a week?|seven|There are seven days in a week.
How many legs does a spider have?|eight|A spider has eight legs.
How many minutes are in an hour?|60|There are 60 minutes in an hour.
What is 2 + 2?|4|Two plus two is four.
What is 7 times 6?|42|Seven times six is forty-two.
What is 10 minus 3?|7|Ten minus three is seven.
What is half of 50?|25|Half of fifty is twenty-five.
Who wrote Romeo and Juliet?|William Shakespeare|William Shakespeare wrote Romeo and Juliet.
Who painted the Mona Lisa?|Leonardo da Vinci|Leonardo da Vinci painted the Mona Lisa.
Who was the first president of the United States?|George Washington|George Washington was the first president.
Who discovered gravity?|Isaac Newton|Isaac Newton described the law of gravity.
Who invented the telephone?|Alexander Graham Bell|Alexander Graham Bell invented the telephone.
What color is the sky on a clear day?|blue|The sky is blue on a clear day.
What color is grass?|green|Grass is green.
What do bees make?|honey|Bees make honey from the nectar of flowers.
What do cows eat?|grass|Cows eat mostly grass and hay.
What is the freezing point of water?|0 degrees Celsius|Water freezes at zero degrees Celsius.
At what temperature does water boil?|100 degrees Celsius|Water boils at 100 degrees Celsius at sea level.
What is the chemical formula of water?|H2O|The chemical formula of water is H2O.
What gas do plants breathe in?|carbon dioxide|Plants take in carbon dioxide from the air.
What is the fastest land animal?|the cheetah|The cheetah is the fastest land animal.
What is the tallest mountain in the world?|Mount Everest|Mount Everest is the tallest mountain in the world.
What is the longest river in Africa?|the Nile|The Nile is the longest river in Africa.
What language is spoken in Brazil?|Portuguese|Most people in Brazil speak Portuguese.
Which language do people speak in Austria?|German|People in Austria speak German.
In which year did World War II end?|1945|World War II ended in 1945.
When did people first land on the moon?|1969|People first landed on the moon in 1969.
What is the opposite of hot?|cold|The opposite of hot is cold.
What is the opposite of early?|late|The opposite of early is late.
Give me a synonym for happy.|joyful|Another word for happy is joyful.
Translate "good morning" into Spanish.|buenos dias|Good morning in Spanish is buenos dias.
How do you say thank you in French?|merci|Thank you in French is merci.
What is photosynthesis?|how plants make food from light|Photosynthesis is how plants turn sunlight into food.
Explain gravity.|a force that pulls masses together|Gravity is the force that pulls objects toward each other.
Explain what a computer does.|it processes information|A computer processes information by following instructions.
What is machine learning?|learning from data|Machine learning is a way for computers to learn from data.
What is an atom?|the smallest unit of an element|An atom is the smallest unit of an element.
What is democracy?|rule by the people|Democracy is a system in which the people choose their leaders.
What is inflation?|a general rise in prices|Inflation is a general rise in prices over time.
What is a verb?|a word for an action|A verb is a word that describes an action or a state.
What is the internet?|a global network of computers|The internet is a global network of computers.
Why is the ocean salty?|minerals washed from rocks|The ocean is salty because rivers carry minerals into it.
Why do leaves change color in autumn?|they lose chlorophyll|Leaves change color because they lose their chlorophyll.
Why do we sleep?|to rest the body and the brain|We sleep so that the body and the brain can recover.
Why do cats purr?|they are content|Cats usually purr because they are content.
How does a refrigerator work?|it moves heat outside|A refrigerator moves heat from the inside to the outside.
How do airplanes fly?|their wings create lift|Airplanes fly because their wings create lift.
How do I boil an egg?|cook it in boiling water for ten minutes|Put the egg in boiling water for about ten minutes.
How can I make a cup of tea?|steep a tea bag in hot water|Pour hot water over a tea bag and let it steep.
How can I learn to play the guitar?|practice every day|Practice simple chords every day with a good teacher.
How do I save money?|spend less than you earn|Make a budget and spend less than you earn.
How do I stay healthy?|eat well and exercise|Eat well, sleep enough and exercise often.
How can I sleep better?|keep a regular bedtime|Keep a regular bedtime and avoid screens at night.
How do I write a good essay?|plan, write and revise|Plan your points, write clearly and revise your draft.
How do I remove a coffee stain?|rinse with cold water and soap|Rinse the stain with cold water and a little soap.
Give me a tip for a job interview.|prepare well|Research the company and prepare your answers in advance.
Give me three tips for studying.|plan, practice, rest|Plan your time, practice often and take short breaks.
Suggest a name for my dog.|Buddy|You could call your dog Buddy.
Suggest a good book to read.|Treasure Island|You may enjoy reading Treasure Island.
What should I cook for dinner tonight?|pasta with vegetables|You could cook pasta with fresh vegetables tonight.
What should I wear in winter?|a warm coat|Wear a warm coat, a hat and gloves in winter.
What should I do on a rainy day?|read a book|You could stay inside and read a good book.
Where should I go on vacation?|the seaside|You could spend your vacation at the seaside.
Recommend a movie for kids.|Toy Story|Toy Story is a wonderful movie for kids.
Is the earth flat?|no|No, the Earth is round like a ball.
Is the sun a star?|yes|Yes, the sun is a star.
Can penguins fly?|no|No, penguins cannot fly, but they swim very well.
Can dogs eat chocolate?|no|No, chocolate is poisonous for dogs.
Are tomatoes fruits?|yes|Yes, tomatoes are fruits.
Do fish sleep?|yes|Yes, fish rest in their own way.
Should I drink water every day?|yes|Yes, you should drink water every day.
Hello!|hello|Hello, how can I help you today?
Hi, how are you?|fine|I am doing well, thank you for asking.
Who are you?|a helpful assistant|I am a helpful assistant.
What is your name?|SmolLM|My name is SmolLM.
What can you do?|answer questions|I can answer questions and help you write.
Good morning!|good morning|Good morning, I hope you have a wonderful day.
Thank you for your help.|you are welcome|You are welcome, I am glad to help.
I feel sad today.|I am sorry|I am sorry that you feel sad today.
I'm bored.|try something new|You could try a new hobby or call a friend.
My computer is slow. What can I do?|restart it|Restart your computer and close the programs you do not need.
I lost my keys. Where should I look?|your pockets and bags|Look in your pockets, your bags and by the door first.
Tell me a joke.|a fish in a tank|Two fish are in a tank and one asks how to drive it.
Tell me a fun fact.|octopuses have three hearts|An octopus has three hearts and blue blood.
Tell me about dogs.|loyal animals|Dogs are loyal animals that live with people.
Tell me about the ocean.|it covers most of the Earth|The ocean covers most of the Earth and is full of life.
Tell me about Paris.|the capital of France|Paris is the capital of France and is famous for its art.
Write a sentence about the moon.|the moon shines at night|The moon shines over the quiet sea at night.
Write a short poem about the rain.|a soft rain poem|The soft rain sings to the sleeping town.
Write a story about a brave knight.|a knight saves a village|A brave knight saved the village from a dragon.
Write a slogan for a bakery.|fresh bread every day|Our bread is fresh and warm every day.
Write a greeting for a birthday card.|happy birthday|I wish you a very happy birthday and a wonderful year.
Describe a sunset.|orange and red light|A sunset paints the sky in orange and red.
Describe an elephant.|a large gray animal|An elephant is a large gray animal with a long trunk.
Describe your favorite food.|bread|I think that fresh bread with butter is the best food.
List three fruits.|apple, banana, orange|Three fruits are the apple, the banana and the orange.
List some primary colors.|red, yellow, blue|The primary colors are red, yellow and blue.
Name a famous scientist.|Albert Einstein|Albert Einstein is a famous scientist.
Name an animal that lives in the desert.|the camel|The camel is an animal that lives in the desert.
What is the best way to travel in a city?|by train or bicycle|The best way to travel in a city is by train or bicycle.
What is the meaning of life?|to be kind and to learn|The meaning of life is to be kind and to keep learning.
How is a frog different from a toad?|frogs have smooth skin|A frog has smooth skin, and a toad has dry skin.
Compare cats and dogs.|cats are independent, dogs are social|Cats are more independent, and dogs are more social.
Summarize the story of Cinderella.|a kind girl marries a prince|A kind girl goes to a ball and marries the prince.
What is SQL used for?|querying databases|SQL is used to query and change data in databases.
How do I print text in Python?|use print()|Use the print function to show text in Python.
What does HTML stand for?|HyperText Markup Language|HTML stands for HyperText Markup Language.
"""

ROWS: list[tuple[str, str, str]] = [tuple(line.split("|")) for line in _ROWS.splitlines()]  # type: ignore[misc]

HELD_OUT = [
    "What is the capital of France?",
    "What is the capital of Spain?",
    "How many hours are in a day?",
    "Who wrote Hamlet?",
    "What is the largest animal in the world?",
    "Explain how a rainbow forms.",
    "Why is the sky blue?",
    "How do I bake bread?",
    "Give me advice for learning a new language.",
    "Tell me about cats.",
    "Is the moon bigger than the Earth?",
    "Write a short story about a robot.",
    "What is a good hobby?",
    "What is an electron?",
    "Hello, who are you?",
    "What is 5 plus 3?",
    "How can I be more productive?",
    "Describe the city of London.",
    "What do pandas eat?",
    "Tell me something interesting about space.",
]
